# Begins the script of a tour. File descriptor 3 is the report, one line for each block.
set -eE
shopt -s expand_aliases
failed() { local code=$?; echo "FAILED (exit code $code): $1" >&2; echo "$1" > "$TOUR/failed"; kill $$; exit 1; }
trap 'exit 1' TERM  # also what fails in the background ends the tour
trap 'failed "$BASH_COMMAND"' ERR
exec 3>&1
TOUR=$PWD LOGS=$PWD/logs
rm -f "$LOGS"/*.pid failed
declare -A first_line=([mock-engine]='"url"' [serve]='"event": "serving"' [publish]='"event"')

# A server runs in the background once it is ready, until another one of its kind replaces it. Its pid is a file, so
# that a command that the README ends with `&`, which is a shell of its own, stops the one before it.
warmroute() {
  case $1 in
    mock-engine | serve | publish) in_background "$@" ;;
    *) command warmroute "$@" ;;
  esac
}

in_background() {
  local log=$LOGS/$1 pid
  stop "$1"
  : > "$log"
  command warmroute "$@" > "$log" 2>&1 3>&- &
  pid=$!
  echo "$pid" > "$log.pid"
  for _ in {1..300}; do
    if grep -q "${first_line[$1]}" "$log" && is_ready "$1"; then cat "$log"; return; fi
    is_running "$pid" || break
    sleep 0.2
  done
  cat "$log"
  echo "warmroute $*: ended before it was ready, or was not ready within 60 s"
  return 1
}

is_ready() { [ "$1" != serve ] || command curl --silent --fail localhost:8080/readyz > /dev/null; }

stop() {
  local pid
  [ -e "$LOGS/$1.pid" ] || return 0
  pid=$(< "$LOGS/$1.pid")
  rm "$LOGS/$1.pid"
  kill "$pid" 2> /dev/null || true
  for _ in {1..900}; do  # a router completes running answers for up to 60 s
    is_running "$pid" || return 0
    sleep 0.1
  done
  echo "warmroute $1 (process $pid) runs 90 s after SIGTERM"
  tail -20 "$LOGS/$1"
  return 1
}

# A server of a shell that has ended is a child of process 1, which leaves it as a zombie in some containers.
is_running() { kill -0 "$1" 2> /dev/null && ! grep -q '^State:.*Z' "/proc/$1/status" 2> /dev/null; }

stop_all() { for kind in "${!first_line[@]}"; do stop "$kind"; done; }
trap stop_all EXIT

curl() { command curl --fail-with-body --silent --show-error "$@"; }

make() { command make $MAKE_OPTIONS "$@"; }

# Mock engines for a page that installs the router without what they need.
engines() { PATH=$TOUR/.venv/bin:$PATH in_background mock-engine "$@"; }

# Number and place of a block: it begins in the root folder, and what it prints goes to a file of its own.
block() {
  cd "$TOUR"
  exec > "output-$1" 2>&1
  echo "$(date +%T) $2" >&3
  last_block=$1
}
