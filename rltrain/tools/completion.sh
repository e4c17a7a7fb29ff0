_rltrain() {{
    local first cur place found=""
    if [ -n "$ZSH_VERSION" ]; then first=$words[2] cur=$words[CURRENT] place=$((CURRENT - 1))
    else first=${{COMP_WORDS[1]}} cur=${{COMP_WORDS[COMP_CWORD]}} place=$COMP_CWORD; fi
    case "$place $first" in
        "1 "*) found="{commands}" ;;
{second}
        *" train"|*" evaluate"|*" doctor"|*" simulate"|*" sweep"|*" resolution") found="{keys}" ;;
    esac
    if [ -n "$ZSH_VERSION" ]; then
        case "$found" in *=*) compadd -S "" -- ${{=found}} ;; *) compadd -- ${{=found}} ;; esac
        [ "$place" = 1 ] || _files
    else
        case "${{COMP_WORDS[COMP_CWORD-1]}}$cur" in *=*) found="" ;; esac
        case "$found" in *=*) compopt -o nospace ;; esac
        COMPREPLY=($(compgen -W "$found" -- "$cur"))
    fi
}}
if [ -n "$ZSH_VERSION" ]; then compdef _rltrain rltrain; else complete -o default -F _rltrain rltrain; fi
