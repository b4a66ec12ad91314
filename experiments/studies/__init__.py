"""Studies that no sweep needs: league, causes, scale of KL, yardstick, training of the testbed."""
