"""Commands that Graphcore's users know, over the tiles of this machine: a device is a chip of it."""
