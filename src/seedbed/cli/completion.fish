# seedbed completion for fish; once: seedbed completion fish > ~/.config/fish/completions/seedbed.fish
complete -c seedbed -a '(SEEDBED_COMPLETE=(commandline -cp) seedbed completion words 2>/dev/null)'
