#!/usr/bin/env bash
# kubernetes.sh FOLDER VERSION: builds FOLDER/bin/{etcd,kube-apiserver,kube-controller-manager,kube-scheduler} from
# Debian 12's packages. Nothing is installed: apt keeps its state in FOLDER, so neither root nor dpkg's lock is needed.
set -euo pipefail
mkdir -p "$1" && cd "$1"
FOLDER=$PWD VERSION=$2
SECONDS=0
say() { printf '%4d s  %s\n' "$SECONDS" "$*"; }

say "reading Debian's package lists"
mkdir -p apt/sources apt/state/lists/partial apt/cache/archives/partial debs root bin
for list in /etc/apt/sources.list.d/*.sources; do
  if test -f "$list"; then sed 's/^Types:.*/Types: deb deb-src/' "$list" > "apt/sources/$(basename "$list")"; fi
done
for list in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
  if test -f "$list"; then sed -n 's/^deb /&/p; s/^deb /deb-src /p' "$list" > "apt/sources/$(basename "$list" .list).list"; fi
done
apt() {
  apt-get -qq -o Dir::State="$FOLDER/apt/state" -o Dir::State::status=/var/lib/dpkg/status \
    -o Dir::Cache="$FOLDER/apt/cache" -o Dir::Etc::SourceList=/dev/null -o Dir::Etc::SourceParts="$FOLDER/apt/sources" \
    -o APT::Sandbox::User="$(id -un)" -o Acquire::Languages=none -o Acquire::Retries=3 "$@"
}
apt update

say "fetching the sources of Kubernetes, the Go compiler and etcd"
(cd debs && apt download golang-1.19-go golang-1.19-src etcd-server golang-github-modern-go-reflect2-dev)
(cd debs && apt source --download-only kubernetes)
ls debs/kubernetes_*"$VERSION"*.orig.tar.gz >/dev/null || { echo "Debian's Kubernetes is not $VERSION" >&2; exit 1; }
for deb in debs/*.deb; do dpkg-deb -x "$deb" root; done
cp root/usr/bin/etcd bin/
SOURCE=$FOLDER/go/src/k8s.io/kubernetes
mkdir -p "$SOURCE"
tar xzf debs/kubernetes_*.orig.tar.gz -C "$SOURCE" --strip-components=1

# GOPATH mode: as a module, Go 1.19 wants to rewrite this old go.mod.
export GOROOT=$FOLDER/root/usr/lib/go-1.19 GOPATH=$FOLDER/go GOCACHE=$FOLDER/go-cache GO111MODULE=off GOFLAGS= GOGC=400 GOMEMLIMIT=1GiB
export GOPROXY=off GOTOOLCHAIN=local CGO_ENABLED=0 PATH=$FOLDER/root/usr/lib/go-1.19/bin:$PATH
cd "$SOURCE"
# The reflect2 in the source package corrupts memory with Go >= 1.18, at the first custom resource.
rm -rf vendor/github.com/modern-go/reflect2
cp -rL "$FOLDER/root/usr/share/gocode/src/github.com/modern-go/reflect2" vendor/github.com/modern-go/

say "generating the OpenAPI definitions, which the source package lacks"
go build -o "$FOLDER/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
packages=$(find -L cmd pkg plugin vendor/k8s.io -type d \( -name testdata -o -path '*/*/vendor' \) -prune -o -name '*.go' -print \
  | grep -vE '^vendor/k8s.io/(code-generator|sample-[a-z-]+|kube-openapi|gengo|klog|utils|heapster|system-validators)/' \
  | xargs grep -l '+k8s:openapi-gen=' | xargs -n1 dirname | LC_ALL=C sort -u | sed 's#^#k8s.io/kubernetes/#' | paste -sd,)
"$FOLDER/openapi-gen" --logtostderr -i "$packages" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
  -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt -r "$FOLDER/openapi.report" 2>"$FOLDER/openapi.log"

flags="-s -w"
for package in component-base/version client-go/pkg/version; do
  prefix=k8s.io/kubernetes/vendor/k8s.io/$package
  flags+=" -X $prefix.gitVersion=v$VERSION -X $prefix.gitMajor=${VERSION%%.*} -X $prefix.gitMinor=$(cut -d. -f2 <<<"$VERSION")"
done
# Without the clouds' SDKs, which no test calls and which are a large part of what there is to compile, and without what
# only a debugger reads. All in one go, so that one program is linked while the next one is compiled.
say "compiling kube-apiserver, kube-controller-manager and kube-scheduler"
go build -trimpath -tags providerless -gcflags=all=-dwarf=false -ldflags "$flags" -o "$FOLDER/bin/" \
  ./cmd/kube-apiserver ./cmd/kube-controller-manager ./cmd/kube-scheduler
say "done"
