"""Tests of the lessons beyond the exercises, against one oracle from the equations."""
