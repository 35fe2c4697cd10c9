#!/usr/bin/env bash
# Installs what `make live-ui` needs, outside the repository: Playwright's Python package and axe-core. The browser is the
# system's (Debian: apt-get install chromium). Safe to run again: each step is skipped if its result exists.
set -euo pipefail

home="${WARMROUTE_LIVE_UI_HOME:-$HOME/.cache/warmroute/ui}"
here="$(cd "$(dirname "$0")" && pwd)"
playwright_version=1.65.2
axe_version=4.14.1

die() { printf 'install.sh: %s\n' "$*" >&2; exit 1; }

command -v chromium >/dev/null || die "chromium is needed (Debian: apt-get install chromium)"
command -v npm >/dev/null || die "npm is needed: axe-core is an npm package"
mkdir -p "$home"
if [ ! -e "$home/site/playwright" ]; then
  "$here/../../.venv/bin/pip" install -q --target "$home/site" "playwright==$playwright_version"
fi
if [ ! -e "$home/package/axe.min.js" ]; then
  (cd "$home" && npm pack -s "axe-core@$axe_version" >/dev/null && tar xzf "axe-core-$axe_version.tgz" package/axe.min.js)
fi
echo "ready under $home"
