"""Commands that a DataScale site has on its PATH: sntilestat, snconfig."""
