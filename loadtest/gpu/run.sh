#!/usr/bin/env bash
# Runs on the machine with the GPU, from the root of the checkout: unpacks what `pack.py` wrote, and measures.
#
#   bash loadtest/gpu/run.sh PIECES OUT [options of measure.py]
#
# OUT receives measured.json and the logs. Needs python3 with PyTorch; nothing is downloaded.
set -euo pipefail
pieces=$1
out=$2
shift 2
site=${WARMROUTE_GPU_SITE:-/tmp/warmroute-site}
folder=${WARMROUTE_GPU_FOLDER:-/tmp/warmroute-gpu}
if [ ! -e "$site/.complete" ]; then
  mkdir -p "$site"
  cat "$pieces"/site.tar.xz.* | tar --extract --xz --directory "$site"
  # Importing thousands of modules takes a minute where nothing has compiled them.
  libraries=$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  python3 -m compileall -q -j 0 "$site" "$libraries/torch" "$libraries/transformers" "$libraries/triton" || true
  touch "$site/.complete"
  echo "unpacked after $SECONDS s"
fi
status=0
PYTHONUNBUFFERED=1 PYTHONPATH="$site:$PWD" python3 -m loadtest.gpu.measure \
  --out "$out/measured.json" --folder "$folder" "$@" || status=$?
tar --create --gzip --file "$out/logs.tar.gz" --directory "$folder" --exclude='*.json' \
  $(cd "$folder" && ls ./*.log ./*.out ./*.jsonl 2>/dev/null) || true
exit $status
