# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench agents`: simulates agents' jobs in virtual time, under two policies."""
