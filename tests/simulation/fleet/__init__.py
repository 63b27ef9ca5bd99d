"""Operations of a deployment, and how the fleet of simulated workers differs: settings, partitions, versions."""
