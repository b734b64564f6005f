#!/bin/sh
# enter.sh SCRATCH FOLDER [SOURCE TARGET ro|rw]... -- COMMAND...
# Runs COMMAND in FOLDER, with every SOURCE bound to its TARGET. Needs a mount namespace of its own (unshare --mount).
# The host's file system is never written to: where a target is missing, its nearest existing parent is covered by a
# tmpfs (in the empty folder SCRATCH at first) that binds everything of that parent again and has room for the target.
# All is done from within SCRATCH, by relative paths: a target such as /tmp may hide SCRATCH and the sources.
set -eu
scratch=$1 folder=$2
mount -t tmpfs none "$scratch"
cd "$scratch"

copy_tree() { # $1: an existing folder, $2: an empty one
  for entry in "$1"/* "$1"/.[!.]*; do
    copy=$2/${entry##*/}
    if [ -L "$entry" ]; then cp -P "$entry" "$copy"
    elif [ -d "$entry" ]; then mkdir "$copy" && mount --rbind "$entry" "$copy"
    elif [ -e "$entry" ]; then : > "$copy" && mount --bind "$entry" "$copy"
    fi
  done
}

covers=0
cover() { # $1: an existing folder
  if [ "$(stat -c %d "$1")" = "$(stat -c %d .)" ]; then return; fi # it is in a cover
  covers=$((covers + 1))
  new=cover$covers
  mkdir "$new"
  if [ "$1" != /run ]; then copy_tree "$1" "$new"; fi # as in a container, nothing of the host's is in /run
  mount -c --rbind "$new" "$1"
}

empty() { # $1: like this, $2: here
  if [ -d "$1" ]; then mkdir -p "$2"; else mkdir -p "${2%/*}" && : > "$2"; fi
}

bind() { # $1: source, $2: target, $3: ro or rw
  if [ ! -e "$2" ]; then
    parent=${2%/*}
    while [ ! -e "$parent" ]; do parent=${parent%/*}; done
    cover "$(readlink -f "$parent")"
    empty "$1" "$2"
  fi
  mount -c --rbind "$1" "$2"
  if [ "$3" = ro ]; then mount -o remount,bind,ro "$2"; fi
}

new_root() { # $1: the missing folders at the top, then this script's own arguments
  root=$PWD/root
  missing=$1
  shift
  mkdir "$root"
  copy_tree "" "$root"
  for name in $missing; do mkdir -p "$root/$name"; done
  exec chroot "$root" sh "$0" "$@"
}

missing_at_top() { # this script's own arguments
  shift 2
  while [ "$1" != -- ]; do
    top=${2#/}
    top=${top%%/*}
    if [ ! -e "/$top" ]; then missing="$missing $top"; fi
    shift 3
  done
}

missing=
missing_at_top "$@"
if [ -n "$missing" ]; then new_root "$missing" "$@"; fi

stage() { # this script's own arguments
  shift 2
  number=0
  while [ "$1" != -- ]; do
    number=$((number + 1))
    empty "$1" "./source$number"
    mount --rbind "$1" "source$number"
    shift 3
  done
}

stage "$@"
shift 2
number=0
while [ "$1" != -- ]; do
  number=$((number + 1))
  bind "source$number" "$2" "$3"
  shift 3
done
shift
cd "$folder"
exec "$@"
