# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of the command `stratakv bench`. Only the command line imports the package."""
