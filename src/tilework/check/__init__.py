"""test: does the artifact compute what the user's module computes?"""
