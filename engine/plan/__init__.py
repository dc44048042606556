# SPDX-License-Identifier: Apache-2.0
"""`stratakv plan`: the division of memory, the rates that decide, and the printed tables."""
