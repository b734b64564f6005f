#!/usr/bin/env bash
# download.sh FOLDER [kubelet]: the control plane's programs as their projects publish them, each compared with the
# checksum beside it. The folder is complete or not there. BAMBOO_KUBERNETES=FOLDER makes the tests take it.
set -euo pipefail
folder=${1:?a folder is expected}
kubernetes=${KUBERNETES_VERSION:-v1.36.2}
etcd=${ETCD_VERSION:-v3.6.8}
kubernetes_site=${KUBERNETES_SITE:-https://dl.k8s.io}
etcd_site=${ETCD_SITE:-https://github.com/etcd-io/etcd/releases/download}
arch=$(uname -m | sed 's/x86_64/amd64/; s/aarch64/arm64/')

mkdir -p "$(dirname "$folder")"
part=$(mktemp -d "$folder.XXXXXX")
trap 'rm -rf "$part"' EXIT
get() { curl --fail --silent --show-error --location --retry 3 --max-time 900 --output "$part/$2" "$1"; }

for program in kube-apiserver kube-controller-manager kube-scheduler "${@:2}"; do
  get "$kubernetes_site/$kubernetes/bin/linux/$arch/$program" "$program"
  get "$kubernetes_site/$kubernetes/bin/linux/$arch/$program.sha256" sum
  echo "$(cat "$part/sum")  $part/$program" | sha256sum --check --quiet
done
archive=etcd-$etcd-linux-$arch.tar.gz
get "$etcd_site/$etcd/$archive" "$archive"
get "$etcd_site/$etcd/SHA256SUMS" sum
(cd "$part" && grep -F "  $archive" sum | sha256sum --check --quiet)
tar -xzf "$part/$archive" -C "$part" --strip-components=1 --no-same-owner "etcd-$etcd-linux-$arch/etcd"
rm "$part/$archive" "$part/sum"
chmod 755 "$part" "$part"/*
mv -T "$part" "$folder"
trap - EXIT
