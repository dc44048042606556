# SPDX-License-Identifier: Apache-2.0
"""One forward pass: its inputs on the device, its attention, its recorded graphs."""
