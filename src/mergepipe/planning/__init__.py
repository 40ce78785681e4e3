"""Planning: statistics, a recipe and a budget give a plan. Pure: no tensor bytes, no clock."""
