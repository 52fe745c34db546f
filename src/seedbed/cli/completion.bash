# seedbed completion for bash; in ~/.bashrc: eval "$(seedbed completion bash)"
_seedbed() {
    local line="${COMP_LINE:0:COMP_POINT}" word kept IFS=$'\n'
    word="${line##*[[:space:]]}"
    # bash breaks words at = and :, and wants only what comes after the last of them.
    kept="${word%"${word##*[=:]}"}"
    COMPREPLY=($(SEEDBED_COMPLETE="$line" seedbed completion words 2>/dev/null))
    COMPREPLY=("${COMPREPLY[@]#"$kept"}")
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace
}
complete -o default -F _seedbed seedbed
