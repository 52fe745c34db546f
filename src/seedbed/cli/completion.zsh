#compdef seedbed
# seedbed completion for zsh; in ~/.zshrc, after compinit: eval "$(seedbed completion zsh)"
_seedbed() {
    local -a found
    found=(${(f)"$(SEEDBED_COMPLETE="${(j: :)words[1,CURRENT]}" seedbed completion words 2>/dev/null)"})
    if (( $#found )); then
        compadd -S '' -a -- found
    else
        _files
    fi
}
compdef _seedbed seedbed
