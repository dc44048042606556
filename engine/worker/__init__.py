# SPDX-License-Identifier: Apache-2.0
"""The worker: computes steps on the device. This package never imports the API or the CLI."""
