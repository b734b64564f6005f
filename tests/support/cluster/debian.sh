# Sourced by the recipes: `debian FOLDER WORDS...` is apt-get that keeps its state in FOLDER, so neither root nor dpkg's
# lock is needed, and that knows the machine's sources, for source packages, too.
say() { printf '%4d s  %s\n' "$SECONDS" "$*"; }

debian() {
  local folder=$1
  shift
  apt-get -qq -o Dir::State="$folder/state" -o Dir::State::status=/var/lib/dpkg/status -o Dir::Cache="$folder/cache" \
    -o Dir::Etc::SourceList=/dev/null -o Dir::Etc::SourceParts="$folder/sources" -o APT::Sandbox::User="$(id -un)" \
    -o Acquire::Languages=none -o Acquire::Retries=3 "$@"
}

read_lists() { # FOLDER: for debian, made here
  say "reading Debian's package lists"
  mkdir -p "$1"/sources "$1"/state/lists/partial "$1"/cache/archives/partial
  local list
  for list in /etc/apt/sources.list.d/*.sources; do
    if test -f "$list"; then sed 's/^Types:.*/Types: deb deb-src/' "$list" >"$1/sources/$(basename "$list")"; fi
  done
  for list in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
    if test -f "$list"; then
      sed -n 's/^deb /&/p; s/^deb /deb-src /p' "$list" >"$1/sources/$(basename "$list" .list).list"
    fi
  done
  debian "$1" update
}
