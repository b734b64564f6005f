#!/usr/bin/env bash
# node.sh FOLDER: fills FOLDER/bin with what a real node needs besides a kubelet, as a small root: containerd, runc, the
# CNI plugins, nft and iptables with their libraries, and busybox, out of Debian 12's packages. Nothing is installed.
set -euo pipefail
. "$(dirname "$0")/debian.sh"
mkdir -p "$1" && cd "$1"
SECONDS=0

read_lists "$PWD/apt"
say "fetching containerd, runc, CNI plugins, nftables and busybox"
mkdir -p debs bin
(cd debs && debian "$OLDPWD/apt" download containerd runc containernetworking-plugins busybox iptables nftables \
  libnftables1 libnftnl11 libip4tc2 libip6tc2 libxtables12 libjansson4 libmnl0 libedit2 libbsd0 libmd0 libseccomp2 \
  libnetfilter-conntrack3 libnfnetlink0)
say "unpacking them"
for deb in debs/*.deb; do dpkg-deb -x "$deb" bin; done
rm -rf bin/usr/share bin/usr/lib/locale
for name in iptables iptables-save iptables-restore ip6tables ip6tables-save ip6tables-restore; do
  ln -sf xtables-nft-multi "bin/usr/sbin/$name"
done
say "done"
