from kvcodec._fast._kernels import *
