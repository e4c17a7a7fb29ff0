#!/bin/bash
unset BASH_ENV
name=${0##*/}
[ "$name" = record ] || set -- "$name" "$@"
file=/records/${EPOCHREALTIME/,/.}.$BASHPID
printf '%s\0' "$@" > "$file"
env -0 > "$file.env"
export BASH_ENV=/bin/prelude
case $1 in
    python*|pip*|sleep) ;;
    sbatch|ssh) bash -s ;;
esac
case $1 in python*) exit 0 ;; esac
for word in "${@:2}"; do
    case $word in *[[:space:]]*python*|*python*[[:space:]]*) bash -c "$word" ;; esac
done
exit 0
