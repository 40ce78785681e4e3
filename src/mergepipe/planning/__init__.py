"""Plan a merge from statistics, a recipe and a budget. Pure: no tensor bytes, no clock."""
