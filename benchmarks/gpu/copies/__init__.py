# SPDX-License-Identifier: Apache-2.0
"""The sections for copies of blocks between GPU and CPU: methods, copy devices and interference
with decode."""
