"""The lab.  It imports support first, which prepares the process before torch is imported."""
import support
