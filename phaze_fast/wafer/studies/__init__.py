"""Studies made of many searches: spaces of wafers, fault maps, comparisons."""
