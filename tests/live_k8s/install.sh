#!/usr/bin/env bash
# Builds what `make live-k8s` needs, outside the repository: a kube-apiserver from Debian's source package (1.20, the
# newest that Debian has), and etcd. Needs apt-get, but installs nothing in the system. About five minutes on two cores.
# Safe to run again: each step is skipped if its result exists.
set -euo pipefail

home="${WARMROUTE_LIVE_K8S_HOME:-$HOME/.cache/warmroute/k8s}"
debian=bookworm
version=1.20.2
began=$SECONDS

say() { printf '[%4ds] %s\n' "$((SECONDS - began))" "$*"; }
die() { printf 'install.sh: %s\n' "$*" >&2; exit 1; }

[ ! -x "$home/kube-apiserver" ] || [ ! -x "$home/etcd" ] || { say "ready under $home"; exit 0; }
command -v apt-get >/dev/null || die "apt-get is needed: Go, etcd and the API server's source are Debian packages"
mkdir -p "$home/apt/lists/partial" "$home/packages" "$home/tools" "$home/source" "$home/path/src/k8s.io"

# Lists of its own, from the system's mirror: the system's may be without sources.
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' "Codename: $debian" | head -n 1)
[ -n "$mirror" ] || die "apt has no sources of Debian $debian, whose API server is built here"
signed="[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $debian main"
printf '%s\n' "deb $signed" "deb-src $signed" > "$home/apt/sources.list"
apt=(apt-get -q -q -o "Dir::Etc::SourceList=$home/apt/sources.list" -o Dir::Etc::SourceParts=/dev/null
     -o "Dir::State::Lists=$home/apt/lists" -o APT::Sandbox::User=root)
if [ ! -e "$home/packages/.complete" ]; then
  say "packages: Go, etcd, and the source of Kubernetes"
  "${apt[@]}" update || die "Debian's packages cannot be reached"
  (cd "$home/packages"
   "${apt[@]}" download etcd-server golang-1.19-go golang-1.19-src golang-github-modern-go-reflect2-dev
   "${apt[@]}" source --download-only kubernetes) || die "packages of Debian $debian cannot be downloaded"
  touch "$home/packages/.complete"
fi

if [ ! -e "$home/source/.complete" ]; then
  say "unpack"
  for package in "$home"/packages/*.deb; do dpkg -x "$package" "$home/tools"; done
  tar xzf "$home"/packages/kubernetes_*.orig.tar.gz -C "$home/source" --strip-components 1
  tar xJf "$home"/packages/kubernetes_*.debian.tar.xz -C "$home/source"
  while read -r patch; do patch -s -p1 -d "$home/source" < "$home/source/debian/patches/$patch"; done < "$home/source/debian/patches/series"
  # The bundled reflect2 crashes with Go 1.18 or newer when it encodes a map.
  rm -rf "$home/source/vendor/github.com/modern-go/reflect2"
  cp -r "$home/tools/usr/share/gocode/src/github.com/modern-go/reflect2" "$home/source/vendor/github.com/modern-go/"
  ln -sfn "$home/source" "$home/path/src/k8s.io/kubernetes"
  cp "$home/tools/usr/bin/etcd" "$home/etcd"
  touch "$home/source/.complete"
fi

export GOROOT="$home/tools/usr/lib/go-1.19" GOPATH="$home/path" GOCACHE="$home/go-cache" GO111MODULE=off CGO_ENABLED=0
cd "$home/path/src/k8s.io/kubernetes"
say "OpenAPI definitions, which the source package does not contain"
"$GOROOT/bin/go" build -o "$home/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
inputs=$(grep -rl --include='*.go' '+k8s:openapi-gen=' staging/src/k8s.io pkg cmd | grep -vE 'code-generator|sample-apiserver|/testdata/|_examples' \
  | xargs -n1 dirname | sort -u | sed 's#^staging/src#k8s.io/kubernetes/vendor#; s#^\(pkg\|cmd\)/#k8s.io/kubernetes/\1/#' | paste -sd,)
"$home/openapi-gen" -O zz_generated.openapi -i "$inputs" -p k8s.io/kubernetes/pkg/generated/openapi \
  -h hack/boilerplate/boilerplate.generatego.txt -r /dev/null --output-base "$home/path/src"

say "kube-apiserver $version (some minutes)"
sed -i -E "s/(gitVersion +(string +)?=).*/\1 \"v$version\"/; s/(gitMajor) string.*/\1 = \"1\"/; s/(gitMinor) string.*/\1 = \"20\"/" \
  staging/src/k8s.io/{component-base,client-go/pkg}/version/base.go
nice -n 19 "$GOROOT/bin/go" build -ldflags "-s -w" -o "$home/kube-apiserver" ./cmd/kube-apiserver
rm -rf "$home/go-cache"
say "ready under $home"
