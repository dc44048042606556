# SPDX-License-Identifier: Apache-2.0
"""The sections for copies of blocks between GPU and CPU, and their interference with decode."""
