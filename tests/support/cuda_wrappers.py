"""Wrappers for CUDA devices as Inductor generates them, without the bodies of their kernels.

`LAYER` is PyTorch 2.13's for a linear layer, GELU, layer norm, attention and a loss over bf16 tensors on an H100.
`OLDER` has the shape of PyTorch 2.11's and 2.12's: streams are named otherwise, `call` is a plain function.
`SYMBOLIC` is PyTorch 2.13's for linear layers, a sum, a sort and a concatenation over `[s27, s77, 256]` of bf16, where
both sizes are symbols.
"""

from __future__ import annotations

LAYER = """
from torch._C import _cuda_getCurrentRawStream as get_raw_stream
from torch._C._dynamo.guards import copy_if_misaligned
empty_strided_cpu_pinned = torch._C._dynamo.guards._empty_strided_cpu_pinned
empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda
async_compile = AsyncCompile()
triton_per_fused_0 = async_compile.triton('triton_per_fused_0', '''
@triton.jit
def triton_per_fused_0(in_ptr0, out_ptr0): ...
''', device_str='cuda')
triton_red_fused_1 = async_compile.triton('triton_red_fused_1', '''
@triton.jit
def triton_red_fused_1(in_ptr0, out_ptr0): ...
''', device_str='cuda')
triton_per_fused_exp_prepare_softmax_online_sub_2 = async_compile.triton(
    'triton_per_fused_exp_prepare_softmax_online_sub_2', '''
@triton.jit
def triton_per_fused_exp_prepare_softmax_online_sub_2(in_ptr0, out_ptr0): ...
''', device_str='cuda')
triton_per_fused_prepare_softmax_online_3 = async_compile.triton('triton_per_fused_prepare_softmax_online_3', '''
@triton.jit
def triton_per_fused_prepare_softmax_online_3(in_ptr0, out_ptr0): ...
''', device_str='cuda')
triton_per_fused_sub_4 = async_compile.triton('triton_per_fused_sub_4', '''
@triton.jit
def triton_per_fused_sub_4(in_ptr0, out_ptr0): ...
''', device_str='cuda')
async_compile.wait(globals())
del async_compile

class Runner:
    def __init__(self, partitions):
        self.partitions = partitions

    def recursively_apply_fns(self, fns):
        new_callables = []
        for fn, c in zip(fns, self.partitions):
            new_callables.append(fn(c))
        self.partitions = new_callables

    def call(self, args):
        x_1, wt_1, b_1, t_1 = args
        args.clear()
        assert_size_stride(b_1, (256, ), (1, ), 'input')
        assert_size_stride(x_1, (128, 256), (256, 1), 'input')
        assert_size_stride(wt_1, (256, 256), (256, 1), 'input')
        with torch.cuda._DeviceGuard(0):
            torch.cuda.set_device(0)
            buf0 = empty_strided_cuda((128, 256), (256, 1), torch.bfloat16)
            b_1 = copy_if_misaligned(b_1)
            x_1 = copy_if_misaligned(x_1)
            wt_1 = copy_if_misaligned(wt_1)
            # Topologically Sorted Source Nodes: [], Original ATen: []
            extern_kernels.addmm(b_1, x_1, wt_1, alpha=1, beta=1, out=buf0)
            del b_1
            del wt_1
            del x_1
            buf1 = empty_strided_cuda((128, 1), (1, 128), torch.float32)
            buf2 = empty_strided_cuda((128, 1), (1, 128), torch.float32)
            buf4 = empty_strided_cuda((2, 4, 64, 64), (16384, 4096, 64, 1), torch.float32)
            buf5 = empty_strided_cuda((2, 4, 64, 64), (16384, 4096, 64, 1), torch.float32)
            buf11 = empty_strided_cuda((2, 4, 64, 64), (16384, 4096, 64, 1), torch.float32)
            # Topologically Sorted Source Nodes: [], Original ATen: []
            raw_stream0 = get_raw_stream(0)
            triton_per_fused_0.run(buf0, buf1, buf2, buf4, buf5, buf11, 128, 256, stream=raw_stream0)
            buf17 = empty_strided_cuda((256, ), (1, ), torch.bfloat16)
            # Topologically Sorted Source Nodes: [], Original ATen: []
            raw_stream0 = get_raw_stream(0)
            triton_red_fused_1.run(buf0, buf1, buf2, buf17, 256, 128, stream=raw_stream0)
            del buf0
            del buf1
            del buf2
            buf6 = empty_strided_cuda((8, 64, 64), (4096, 64, 1), torch.float32)
            # Topologically Sorted Source Nodes: [], Original ATen: []
            extern_kernels.bmm(reinterpret_tensor(buf4, (8, 64, 64), (4096, 64, 1), 0),
                reinterpret_tensor(buf5, (8, 64, 64), (4096, 64, 1), 0), out=buf6)
            del buf4
            del buf5
            buf10 = reinterpret_tensor(buf6, (2, 4, 64, 64), (16384, 4096, 64, 1), 0); del buf6  # reuse
            # Topologically Sorted Source Nodes: [], Original ATen: [prims.prepare_softmax_online, aten.sub, aten.exp]
            raw_stream0 = get_raw_stream(0)
            triton_per_fused_exp_prepare_softmax_online_sub_2.run(buf10, 512, 64, stream=raw_stream0)
            buf12 = empty_strided_cuda((8, 64, 64), (4096, 64, 1), torch.float32)
            # Topologically Sorted Source Nodes: [], Original ATen: [aten.sub, aten.exp]
            extern_kernels.bmm(reinterpret_tensor(buf10, (8, 64, 64), (4096, 64, 1), 0),
                reinterpret_tensor(buf11, (8, 64, 64), (4096, 64, 1), 0), out=buf12)
            del buf10
            del buf11
            buf13 = empty_strided_cuda((512, 1), (1, 512), torch.float32)
            buf14 = empty_strided_cuda((512, 1), (1, 512), torch.float32)
            # Topologically Sorted Source Nodes: [], Original ATen: [prims.prepare_softmax_online]
            raw_stream0 = get_raw_stream(0)
            triton_per_fused_prepare_softmax_online_3.run(buf12, buf13, buf14, 512, 64, stream=raw_stream0)
            assert_size_stride(t_1, (512, ), (1, ), 'input')
            buf16 = empty_strided_cuda((), (), torch.float32)
            buf18 = buf16; del buf16  # reuse
            # Topologically Sorted Source Nodes: [], Original ATen: [aten.sub]
            raw_stream0 = get_raw_stream(0)
            triton_per_fused_sub_4.run(buf18, t_1, buf12, buf13, buf14, 1, 512, stream=raw_stream0)
            del buf12
            del buf13
            del buf14
            del t_1
        return (buf18, buf17, )
"""

OLDER = """
empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda
triton_poi_fused_relu_0 = async_compile.triton('triton_poi_fused_relu_0', ...)
triton_red_fused_sum_1 = async_compile.triton('triton_red_fused_sum_1', ...)

def call(args):
    primals_1, primals_2 = args
    args.clear()
    assert_size_stride(primals_1, (100, 100), (100, 1))
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        buf0 = empty_strided_cuda((100, 100), (100, 1), torch.float32)
        extern_kernels.mm(primals_1, primals_2, out=buf0)
        del primals_2
        buf1 = buf0; del buf0  # reuse
        stream0 = get_raw_stream(0)
        triton_poi_fused_relu_0.run(buf1, 10000, stream=stream0)
        workspace_0 = empty_strided_cuda((4096, ), (1, ), torch.uint8)
        workspace_0.zero_()
        buf2 = empty_strided_cuda((), (), torch.float32)
        triton_red_fused_sum_1.run(buf1, buf2, workspace_0, 1, 10000, stream=stream0)
        del workspace_0
        buf3 = torch.ops.aten.full.default([100, 100], 1, dtype=torch.float32, device=device(type='cuda', index=0),
            pin_memory=False)
        buf4 = buf3
        del buf3
        # Topologically Sorted Source Nodes: [o], Original ATen: [aten._scaled_dot_product_flash_attention]
        buf5 = torch.ops.aten._scaled_dot_product_flash_attention.default(
            reinterpret_tensor(buf1, (1, 1, 100, 64), (6400, 6400, 64, 1), 0),
            reinterpret_tensor(buf1, (1, 1, 100, 64), (6400, 6400, 64, 1), 0),
            reinterpret_tensor(buf1, (1, 1, 100, 64), (6400, 6400, 64, 1), 0), 0.0, True, scale=0.125)
        buf6 = buf5[0]
        del buf5
    return (buf2, buf4, buf6, primals_1, )
"""

SYMBOLIC = """
triton_per_fused_0 = async_compile.triton('triton_per_fused_0', ...)
triton_red_fused_1 = async_compile.triton('triton_red_fused_1', ...)
triton_per_fused_2 = async_compile.triton('triton_per_fused_2', ...)
triton_per_fused_3 = async_compile.triton('triton_per_fused_3', ...)
triton_poi_fused_4 = async_compile.triton('triton_poi_fused_4', ...)

class Runner:
    def call(self, args):
        arg0_1, arg1_1, arg2_1, arg3_1, arg4_1 = args
        args.clear()
        s27 = arg0_1
        s77 = arg1_1
        assert_size_stride(arg4_1, (256, ), (1, ), 'input')
        assert_size_stride(arg2_1, (s27, s77, 256), (256*s77, 256, 1), 'input')
        assert_size_stride(arg3_1, (256, 256), (256, 1), 'input')
        with torch.cuda._DeviceGuard(0):
            torch.cuda.set_device(0)
            buf0 = empty_strided_cuda((s27*s77, 256), (256, 1), torch.bfloat16)
            arg4_1 = copy_if_misaligned(arg4_1)
            arg2_1 = copy_if_misaligned(arg2_1)
            arg3_1 = copy_if_misaligned(arg3_1)
            extern_kernels.addmm(arg4_1, reinterpret_tensor(arg2_1, (s27*s77, 256), (256, 1), 0),
                    reinterpret_tensor(arg3_1, (256, 256), (1, 256), 0), alpha=1, beta=1, out=buf0)
            del arg2_1
            del arg4_1
            buf4 = reinterpret_tensor(buf0, (s27, s77, 256), (256*s77, 256, 1), 0); del buf0  # reuse
            triton_per_fused_0_xnumel = s27*s77
            raw_stream0 = get_raw_stream(0)
            triton_per_fused_0.run(buf4, triton_per_fused_0_xnumel, 256, stream=raw_stream0)
            buf5 = empty_strided_cuda((s27*s77, 256), (256, 1), torch.bfloat16)
            extern_kernels.mm(reinterpret_tensor(buf4, (s27*s77, 256), (256, 1), 0),
                    reinterpret_tensor(arg3_1, (256, 256), (1, 256), 0), out=buf5)
            del arg3_1
            del buf4
            buf6 = empty_strided_cuda((256, 3), (1, 256), torch.float32)
            triton_red_fused_1_r0_numel = (2 + s27*s77) // 3
            raw_stream0 = get_raw_stream(0)
            triton_red_fused_1.run(buf5, buf6, s27, s77, 768, triton_red_fused_1_r0_numel, stream=raw_stream0)
            buf7 = empty_strided_cuda((256, ), (1, ), torch.float32)
            raw_stream0 = get_raw_stream(0)
            triton_per_fused_2.run(buf6, buf7, 256, 3, stream=raw_stream0)
            del buf6
            buf8 = empty_strided_cuda((s27*s77, ), (1, ), torch.bfloat16)
            buf14 = empty_strided_cuda((1 + s27*s77, 256), (256, 1), torch.bfloat16)
            buf12 = reinterpret_tensor(buf14, (s27*s77, 256), (256, 1), 0)  # alias
            triton_per_fused_3_xnumel = s27*s77
            raw_stream0 = get_raw_stream(0)
            triton_per_fused_3.run(buf5, buf8, buf12, triton_per_fused_3_xnumel, 256, stream=raw_stream0)
            buf9 = torch.ops.aten.sort.stable(buf8, stable=False, dim=0, descending=False)
            del buf8
            buf10 = buf9[0]
            assert_size_stride(buf10, (s27*s77, ), (1, ), 'torch.ops.aten.sort.default')
            del buf9
            buf13 = reinterpret_tensor(buf14, (1, 256), (256, 1), 256*s27*s77)  # alias
            raw_stream0 = get_raw_stream(0)
            triton_poi_fused_4.run(buf5, buf13, 256, stream=raw_stream0)
            del buf5
        return (buf7, buf10, buf14, )
"""
