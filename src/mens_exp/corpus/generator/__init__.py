"""``data=synthetic``: small programming tasks with verified tests, drawn from a seed."""
