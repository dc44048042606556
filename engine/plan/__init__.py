# SPDX-License-Identifier: Apache-2.0
"""`stratakv plan`: arithmetic of memory and loading times, rates of the machine, tables."""
