"""The ways of using the optimizer: drop-in, `module=`, inside DDP; uneven inputs."""
