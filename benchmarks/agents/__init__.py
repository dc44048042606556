# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench agents`: agents' jobs under scheduling policies, in virtual time."""
