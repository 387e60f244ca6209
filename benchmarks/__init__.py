"""Speed of the kernels beside their peers, and the judge on a GPU. Not part of the installed packages."""
