"""What a run leaves behind: its folder, rows, events, report and journal entry. Nothing here needs torch."""
