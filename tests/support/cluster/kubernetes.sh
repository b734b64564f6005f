#!/usr/bin/env bash
# kubernetes.sh FOLDER VERSION PROGRAM...: builds FOLDER/bin/PROGRAM from Debian 12's packages: etcd, kube-apiserver,
# kube-controller-manager, kube-scheduler, kubelet. Nothing is installed.
set -euo pipefail
. "$(dirname "$0")/debian.sh"
mkdir -p "$1" && cd "$1"
FOLDER=$PWD VERSION=$2 PROGRAMS=" ${*:3} "
SECONDS=0

read_lists "$FOLDER/apt"
say "fetching the sources of Kubernetes, the Go compiler and etcd"
mkdir -p debs root bin
(cd debs && debian "$FOLDER/apt" download golang-1.19-go golang-1.19-src etcd-server golang-github-modern-go-reflect2-dev)
(cd debs && debian "$FOLDER/apt" source --download-only kubernetes)
ls debs/kubernetes_*"$VERSION"*.orig.tar.gz >/dev/null || { echo "Debian's Kubernetes is not $VERSION" >&2; exit 1; }
say "unpacking them"
for deb in debs/*.deb; do dpkg-deb -x "$deb" root; done
if [[ $PROGRAMS = *" etcd "* ]]; then cp root/usr/bin/etcd bin/; fi
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

if [[ $PROGRAMS = *" kube-apiserver "* ]]; then
  say "generating the OpenAPI definitions, which the source package lacks"
  go build -o "$FOLDER/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
  packages=$(find -L cmd pkg plugin vendor/k8s.io -type d \( -name testdata -o -path '*/*/vendor' \) -prune -o -name '*.go' -print \
    | grep -vE '^vendor/k8s.io/(code-generator|sample-[a-z-]+|kube-openapi|gengo|klog|utils|heapster|system-validators)/' \
    | xargs grep -l '+k8s:openapi-gen=' | xargs -n1 dirname | LC_ALL=C sort -u | sed 's#^#k8s.io/kubernetes/#' | paste -sd,)
  "$FOLDER/openapi-gen" --logtostderr -i "$packages" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
    -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt -r "$FOLDER/openapi.report" 2>"$FOLDER/openapi.log"
fi

flags="-s -w"
for package in component-base/version client-go/pkg/version; do
  prefix=k8s.io/kubernetes/vendor/k8s.io/$package
  flags+=" -X $prefix.gitVersion=v$VERSION -X $prefix.gitMajor=${VERSION%%.*} -X $prefix.gitMinor=$(cut -d. -f2 <<<"$VERSION")"
done
# Without the clouds' SDKs, which no test calls and which are a large part of what there is to compile, and without what
# only a debugger reads. All in one go, so that one program is linked while the next one is compiled.
commands=()
for program in "${@:3}"; do if [ "$program" != etcd ]; then commands+=("./cmd/$program"); fi; done
say "compiling ${commands[*]##*/}"
go build -trimpath -tags providerless -gcflags=all=-dwarf=false -ldflags "$flags" -o "$FOLDER/bin/" "${commands[@]}"
say "done"
