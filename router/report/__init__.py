"""How are figures shown to a reader? Values in, HTML text out: `plots` draws, `page` frames."""
