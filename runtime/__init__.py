"""The methods of kvsim, really running in torch with packed storage."""
