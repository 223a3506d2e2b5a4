"""The split as one page: matrices, balance, the timeline of a step, the text of every chip."""
