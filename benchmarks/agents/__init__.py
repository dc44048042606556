# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench agents`: simulates agents' jobs under two scheduling policies, in virtual
time."""
