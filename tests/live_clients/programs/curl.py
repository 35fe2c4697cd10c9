"""curl: runs the steps of standard input against a base URL, and prints what it prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

PATHS = {
    "chat": "chat/completions",
    "completions": "completions",
    "responses": "responses",
    "messages": "messages",
    "count_tokens": "messages/count_tokens",
    "embeddings": "embeddings",
    "speech": "audio/speech",
    "transcription": "audio/transcriptions",
    "file": "files",
}


def options(api: str, body: dict[str, Any], file: str) -> list[str]:
    if api in ("transcription", "file"):
        fields = {name: json.dumps(value) if isinstance(value, bool) else value for name, value in body.items()}
        return ["-F", f"file=@{file}", *(part for name, value in fields.items() for part in ("-F", f"{name}={value}"))]
    return ["-H", "content-type: application/json", "-d", json.dumps(body)]


def main() -> None:
    with TemporaryDirectory() as folder:
        file = Path(folder, "note.wav")
        file.write_bytes(b"RIFF" + bytes(range(256)) * 64)
        for step in json.load(sys.stdin):
            url = f"{sys.argv[1]}/v1/{PATHS[step['api']]}"
            command = ["curl", "-sSN", "--max-time", "120", url, *options(step["api"], step["body"], str(file))]
            ran = subprocess.run(command, capture_output=True, check=True)
            print(json.dumps(ran.stdout.decode("latin-1")))


main()
