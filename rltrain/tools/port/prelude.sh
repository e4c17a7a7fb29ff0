command_not_found_handle() { /bin/record "$@"; }
cd() { builtin cd "$@" 2>/dev/null || true; }
pushd() { cd "$@"; }
popd() { true; }
ulimit() { true; }
source() { if [ -f "$1" ]; then builtin source "$@"; else /bin/record source "$@"; fi; }
.() { source "$@"; }
