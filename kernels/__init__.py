# SPDX-License-Identifier: Apache-2.0
"""Bytes on the device: the place for kernels, none written yet; imports nothing of ours."""
