# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench serve`: many clients over HTTP."""
