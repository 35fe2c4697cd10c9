"""Other routers' published formulas: a plug-in of the simulator, which `serve` neither imports nor accepts."""
