"""Tests of complete runs, files, ranks, rejected input and the pages."""
