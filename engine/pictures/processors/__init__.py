# SPDX-License-Identifier: Apache-2.0
"""Processors of pictures, one for each kind of model."""
