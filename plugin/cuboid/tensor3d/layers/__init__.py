"""The sharded layers and the loss."""
