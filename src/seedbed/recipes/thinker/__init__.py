"""thinker: a few latents, one shared block and as many steps as you like, on exact generated tasks."""
