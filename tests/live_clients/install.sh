#!/usr/bin/env bash
# Installs the clients of `make live-clients`, outside the repository and its virtual environment: the SDKs of OpenAI and
# Anthropic for Python and Node, LangChain, and Vercel's AI SDK. Safe to run again: each step is skipped if its result exists.
set -euo pipefail

home="${WARMROUTE_CLIENTS_HOME:-$HOME/.cache/warmroute/clients}"
python="${PYTHON:-python3.11}"
python_packages=(openai==3.57.0 anthropic==2.14.0 langchain-openai==1.7.4 langchain-anthropic==1.7.10)
node_packages=(openai@7.59.0 @anthropic-ai/sdk@1.14.0 ai@7.0.173 @ai-sdk/openai@4.0.118
  @ai-sdk/openai-compatible@3.0.92 @ai-sdk/anthropic@4.0.105)

die() { printf 'install.sh: %s\n' "$*" >&2; exit 1; }

command -v "$python" >/dev/null || die "$python is needed"
command -v npm >/dev/null || die "npm is needed, for the SDKs of Node"
command -v curl >/dev/null || die "curl is needed: it is one of the clients"
mkdir -p "$home/node"

if [ "$(cat "$home/python.complete" 2>/dev/null)" != "${python_packages[*]}" ]; then
  echo "SDKs for Python: ${python_packages[*]}"
  "$python" -m venv --clear "$home/python"
  "$home/python/bin/pip" install -q "${python_packages[@]}"
  echo "${python_packages[*]}" > "$home/python.complete"
fi

if [ "$(cat "$home/node.complete" 2>/dev/null)" != "${node_packages[*]}" ]; then
  echo "SDKs for Node: ${node_packages[*]}"
  npm install -s --no-audit --no-fund --prefix "$home/node" "${node_packages[@]}"
  echo "${node_packages[*]}" > "$home/node.complete"
fi
echo "ready under $home"
