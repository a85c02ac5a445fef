"""What beginners write: one wrong line each, and what a message that mends has to name.

`OLD` is for `neuronxcc.nki`, `NEW` for `nki`. Each entry: name -> (lines, words). The lines stand
in `HEADS`: `x` and `y` are tiles (128, 64) in SBUF, `x_hbm` and `y_hbm` the arguments, `out_hbm`
the result; `r` is stored in it. The words are a regular expression of what mends the line.
"""

HEADS = {
    "neuronxcc": (
        "import math\nimport numpy as np\nimport torch\nfrom neuronxcc import nki\n"
        "import neuronxcc.nki.isa as nisa\nimport neuronxcc.nki.language as nl\n\n\n"
        "@nki.jit\ndef kernel(x_hbm, y_hbm):\n"
        "    out_hbm = nl.ndarray((128, 64), nl.float32, buffer=nl.shared_hbm)\n"
        "    x, y = nl.load(x_hbm), nl.load(y_hbm)\n",
        "    nl.store(out_hbm, r)\n    return out_hbm\n",
    ),
    "nki": (
        "import math\nimport numpy as np\nimport torch\nimport nki\n"
        "import nki.isa as nisa\nimport nki.language as nl\n\n\n"
        "@nki.jit\ndef kernel(x_hbm, y_hbm):\n"
        "    out_hbm = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.shared_hbm)\n"
        "    x = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf)\n"
        "    y = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf)\n"
        "    r = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf)\n"
        "    nisa.dma_copy(dst=x, src=x_hbm)\n    nisa.dma_copy(dst=y, src=y_hbm)\n",
        "    nisa.dma_copy(dst=out_hbm, src=r)\n    return out_hbm\n",
    ),
}

OLD = {
    "ndarray without a buffer, then a store": (
        "r = x\no = nl.ndarray((128, 64), nl.float32)\nnl.store(o, x)",
        r"shared_hbm",
    ),
    "nc_matmul as a @ b": ("r = nisa.nc_matmul(x, y[0:64, 0:64])", r"transpose|nl\.matmul"),
    "where of indices": (
        "i, j = nl.mgrid[0:128, 0:64]\nr = nl.where(i >= j, x, -1e30)",
        r"affine_select",
    ),
    "python where of indices": (
        "i, j = nl.mgrid[0:128, 0:64]\nx[j > i] = -1e30\nr = x",
        r"affine_select",
    ),
    "torch.exp": ("r = torch.exp(x)", r"nl\.exp"),
    "np.exp": ("r = np.exp(x)", r"nl\.exp"),
    "math.exp": ("r = math.exp(x)", r"nl\.exp"),
    "math.sqrt": ("r = math.sqrt(x)", r"functions of nl"),
    "a @ b": ("r = x @ y", r"nl\.matmul"),
    "tile.T": ("r = x.T", r"nl\.transpose"),
    "tile.sum()": ("r = x - x.sum(axis=1)", r"nl\.sum"),
    "tile.max": ("r = x - x.max(1)", r"nl\.max"),
    "F.softmax": ("r = torch.nn.functional.softmax(x, dim=-1)", r"nl\.softmax"),
    "F.relu": ("r = torch.relu(x)", r"nl\.relu"),
    "np.maximum": ("r = np.maximum(x, 0)", r"nl\.maximum"),
    "python max": ("r = max(x, y)", r"nl\.maximum|nl\.where"),
    "python abs": ("r = abs(x)", r"nl\.abs"),
    "python sum": ("r = sum(x)", r"nl\.sum"),
    "if on a tile": ("r = x if x > 0 else y", r"nl\.where"),
    "if on an element": ("if x[0, 0] > 0:\n    r = x\nelse:\n    r = y", r"nl\.where"),
    "while on a tile": ("while x > 1:\n    x = x / 2\nr = x", r"nl\.where|sequential_range"),
    "and of tiles": ("r = nl.where((x > 0) and (y > 0), x, y)", r"nl\.logical_and|&"),
    "chained comparison": ("r = nl.where(0 < x < 1, x, y)", r"nl\.logical_and|&"),
    "float of an element": ("r = x * float(y[0, 0])", r"functions of nl"),
    "int of an element": ("r = x[:, 0 : int(y[0, 0])]", r"as arguments"),
    "item": ("r = x * y.item()", r"device_print"),
    "print of a tile's value": ("print(x[0, 0].item())\nr = x", r"device_print"),
    "numpy of a tile": ("r = np.array(x)", r"NKI_CPU_EAGER|nl\.load"),
    "for over a tile": ("r = x\nfor row in x:\n    r = row", r"range|shape"),
    "len of a tile": ("r = x * len(x)", r"shape\[0\]"),
    "no load": ("r = nl.exp(x_hbm)", r"nl\.load"),
    "add of arguments": ("r = x_hbm + y_hbm", r"nl\.load"),
    "assigns to HBM": ("out_hbm[:, :] = x\nr = x", r"nl\.store"),
    "256 partitions": ("r = nl.zeros((256, 64), nl.float32, buffer=nl.sbuf)", r"128"),
    "load of 256 rows": (
        "r = nl.load(nl.ndarray((256, 64), nl.float32, buffer=nl.shared_hbm))",
        r"128",
    ),
    "PSUM too wide": (
        "r = nl.zeros((128, 4096), nl.float32, buffer=nl.psum)",
        r"512|2 ?KiB|2048|16 ?KiB|4096",
    ),
    "contraction too long": (
        "r = nisa.nc_matmul(nl.zeros((128, 256), nl.float32, buffer=nl.sbuf), y)",
        r"128",
    ),
    "moving too wide": (
        "r = nisa.nc_matmul(x, nl.zeros((128, 1024), nl.float32, buffer=nl.sbuf))",
        r"512",
    ),
    "shapes differ": (
        "r = x + nl.zeros((128, 32), nl.float32, buffer=nl.sbuf)",
        r"shape|broadcast|keepdims",
    ),
    "row broadcast along partitions": (
        "g = nl.load(y_hbm[0:1, 0:64])\nr = x * g",
        r"broadcast_to|partition",
    ),
    "reduction over partitions": ("r = x - nl.sum(x, axis=0)", r"nc_matmul|transpose|ones"),
    "out of bounds": ("r = nl.load(x_hbm[0:128, 0:80])", r"mask|64"),
    "ceil tiles without a mask": (
        "i, j = nl.mgrid[0:128, 0:64]\nr = nl.load(x_hbm[64 + i, j])",
        r"mask",
    ),
    "wrong dst shape": ("r = x[:, 0:32]", r"32|shape"),
    "nothing stored": ("return out_hbm\nr = x", r"nl\.store|written"),
    "returns a tile": ("return x\nr = x", r"shared_hbm"),
    "returns nothing": ("nl.store(out_hbm, x)\nreturn\nr = x", r"return"),
    "private_hbm result": (
        "o = nl.ndarray((128, 64), nl.float32, buffer=nl.hbm)\nnl.store(o, x)\nreturn o\nr = x",
        r"shared_hbm",
    ),
    "float64": ("r = nl.zeros((128, 64), nl.float64, buffer=nl.sbuf)", r"nl\.float32"),
    "np.float64": ("r = nl.zeros((128, 64), np.float64, buffer=nl.sbuf)", r"float32"),
    "string dtype": ("r = nl.zeros((128, 64), 'float23', buffer=nl.sbuf)", r"nl\.float32|float32"),
    "nl.clamp": ("r = nl.clamp(x, 0, 1)", r"nl\.minimum"),
    "nl.dot": ("r = nl.dot(x, y)", r"nl\.matmul"),
    "nl.empty": ("r = nl.empty((128, 64), nl.float32)", r"nl\.ndarray"),
    "nl.cat": ("r = nl.cat([x, y])", r"slice"),
    "nl.tril": ("r = nl.tril(x)", r"affine_select"),
    "nl.pow": ("r = nl.pow(x, 2)", r"nl\.power"),
    "nl.syncthreads": ("nl.syncthreads()\nr = x", r"wait"),
    "typo": ("r = nl.expp(x)", r"nl\.exp\b"),
    "wrong keyword": ("r = nl.sum(x, dim=1)", r"axis"),
    "keepdim of torch": ("r = x - nl.sum(x, axis=1, keepdim=True)", r"keepdims"),
    "argument missing": ("r = nl.sum(x)", r"axis"),
    "engine as an op": ("r = nisa.activation(nl.add, x)", r"nl\.exp|activation function|tensor_"),
    "positional order of activation": ("r = nisa.activation(x, nl.exp)", r"op="),
    "affine_range carries a sum": (
        "r = nl.zeros((128, 64), nl.float32, buffer=nl.sbuf)\n"
        "for k in nl.affine_range(4):\n"
        "    r[...] = r * 0.5 + x",
        r"sequential_range",
    ),
    "range over columns races": (
        "r = nl.ndarray((128, 64), nl.float32, buffer=nl.sbuf)\n"
        "for k in nl.affine_range(2):\n"
        "    r[:, 0:64] = x",
        r"sequential_range|slice|iteration",
    ),
    "read before write": ("r = nl.ndarray((128, 64), nl.float32, buffer=nl.sbuf)", r"memset"),
    "tile of a loop used after it": (
        "for k in nl.affine_range(2):\n    t = nl.load(x_hbm)\nr = t",
        r"before the loop|outside|allocate",
    ),
    "nested list index": ("r = x[[0, 1, 2]]", r"slice|nl\.arange|index"),
    "boolean index": ("r = x[x > 0]", r"nl\.where"),
    "negative step": ("r = x[:, ::-1]", r"nl\.load|step|flip|dma"),
    "None index": ("r = x[:, None, :]", r"reshape|expand_dims|broadcast"),
    "index without arange axes": (
        "i = nl.arange(128)\nr = nl.load(x_hbm[i, 0:64])",
        r"\[:, None\]",
    ),
    "store into a slice of another shape": ("nl.store(out_hbm[0:64], x)\nr = x", r"64"),
    "program_id without a grid": (
        "r = nl.load(x_hbm[nl.program_id(0) * 128 + nl.arange(128)[:, None], "
        "nl.arange(64)[None, :]])",
        r"grid|kernel\[",
    ),
    "unknown module function": ("r = nl.softmax_stable(x, axis=-1)", r"nl\.softmax"),
    "nisa.exp": ("r = nisa.exp(x)", r"nisa\.activation"),
    "nisa.matmul": ("r = nisa.matmul(x, y)", r"nc_matmul"),
    "stationary in PSUM": (
        "p = nisa.nc_matmul(x, y)\nr = nisa.nc_matmul(p, p)",
        r"nl\.copy|tensor_copy|SBUF|sbuf",
    ),
    "in place on a load": ("x += 1\nr = x[0]", r"slice|shape|\[0:1|partition"),
    "name of the other language": (
        "r = nl.ndarray((128, 64), nl.float32, buffer=nl.sbuf)\n"
        "nisa.activation(dst=r, op=nl.exp, data=x)",
        r"nisa\.activation\(op|returns|dst",
    ),
    "F.pad": ("r = torch.nn.functional.pad(x, (0, 1))", r"slices"),
    "tile.reshape(-1)": ("r = x.reshape(-1)", r"nc_transpose"),
    "tile.permute": ("r = x.permute(1, 0)", r"nl\.transpose"),
    "tile.to": ("r = x.to(nl.bfloat16)", r"nl\.copy"),
    "tile.half": ("r = x.half()", r"nl\.copy"),
    "bf16 as a string": ("r = x.astype('bf16')", r"bfloat16"),
    "mean without an axis": ("r = x - nl.mean(x)", r"axis"),
    "sum over both axes": ("r = x - nl.sum(x, axis=(0, 1), keepdims=True)", r"ones|transpose"),
    "zeros without a type": ("r = nl.zeros(128)", r"dtype"),
    "full without a type": ("r = nl.full((128, 64), 1.0)", r"dtype"),
    "nl.concatenate": ("r = nl.concatenate([x, y], axis=1)", r"slice"),
    "nl.split": ("r = nl.split(x, 2)", r"slices"),
    "nl.einsum": ("r = nl.einsum('ij,jk->ik', x, y)", r"nl\.matmul"),
    "nl.gelu_tanh": ("r = nl.gelu_tanh(x)", r"gelu_apprx_tanh"),
    "nl.swish": ("r = nl.swish(x)", r"nl\.silu"),
    "nl.argmax": ("r = nl.argmax(x, axis=1)", r"nc_find_index8"),
    "nl.cumsum": ("r = nl.cumsum(x)", r"tensor_tensor_scan"),
    "matmul of equal shapes": ("r = nl.matmul(x, y)", r"transpose x first"),
    "load of a number": ("r = nl.load(3)", r"memset"),
    "load of a tile": ("r = nl.load(x)", r"nl\.copy"),
    "store with swapped arguments": ("nl.store(x, out_hbm)\nr = x", r"shared_hbm"),
    "store of one argument": ("nl.store(x)\nr = x", r"a tensor in HBM and the tile"),
    "store to an argument": ("nl.store(x_hbm, x)\nr = x", r"shared_hbm"),
    "size as a method": ("r = x * x.size(0)", r"shape\[0\]"),
    "range of a tile": ("r = x\nfor i in range(x):\n    pass", r"as arguments"),
    "trip count of /": (
        "for i in nl.affine_range(128 / 64):\n    r = x\nr = x",
        r"integers|shapes",
    ),
    "floor division": ("r = x // 2", r"nl\.floor"),
    "modulo": ("r = x % 2", r"nl\.mod"),
    "lambda as an op": ("r = nisa.activation(op=lambda v: v, data=x)", r"nl or numpy function"),
    "assert of a tile": ("assert x > 0\nr = x", r"nl\.where"),
    "three subscripts": ("r = x[0, 0, 0]", r"reshape|expand_dims"),
    "slice bound of /": ("r = x[:, 0 : 64 / 2]", r"//"),
    "name as a subscript": ("r = x['a']", r"slice"),
    "unknown buffer": ("r = nl.zeros((128, 64), nl.float32, buffer='sram')", r"nl\.sbuf"),
    "nl.int64": ("r = nl.zeros((128, 64), nl.int64, buffer=nl.psum)", r"nl\.int32"),
    "shape of -1": ("r = nl.zeros((128, -1), nl.float32)", r"positive"),
    "shape of /": ("r = nl.zeros((128, 64 / 2), nl.float32)", r"integers"),
    "softmax with dim": ("r = nl.softmax(x, dim=-1)", r"axis="),
    "numpy operand": ("r = x + np.ones((128, 64))", r"nl\.load"),
    "torch operand": ("r = x + torch.ones(128, 64)", r"nl\.load"),
    "nl.print": ("nl.print(x)\nr = x", r"device_print"),
    "first row alone": ("r = x[0]", r"slice both sides"),
}

NEW = {
    "a @ b": ("r = x @ y", r"nc_matmul"),
    "torch.exp": ("r = torch.exp(x)", r"nl\.exp"),
    "nl.clamp": ("r = nl.clamp(x, 0, 1)", r"nl\.minimum"),
    "nl.arange": ("i = nl.arange(128)\nr = x", r"nl\.ds|slices"),
    "mgrid": ("i, j = nl.mgrid[0:128, 0:64]\nr = x", r"nl\.ds|slices"),
    "no dst": ("r = nisa.activation(op=nl.exp, data=x)", r"dst"),
    "nc_matmul returns": ("r = nisa.nc_matmul(x, y)", r"dst|moving"),
    "matmul into SBUF": ("nisa.nc_matmul(dst=r[0:64, 0:64], stationary=x, moving=y)", r"psum"),
    "grid of a former language": ("r = x[nl.program_id(0)]", r"slice|\[0:1|shape|partition"),
    "tile.T": ("r = x.T", r"nc_transpose"),
    "tile.sum": ("r = x.sum()", r"nl\.sum"),
    "if on a tile": ("if x > 0:\n    r = x", r"nl\.where"),
    "len": ("r = x * len(x)", r"shape\[0\]"),
    "256 partitions": ("r = nl.ndarray((256, 64), dtype=nl.float32, buffer=nl.sbuf)", r"128"),
    "reads HBM": ("nisa.activation(dst=r, op=nl.exp, data=x_hbm)", r"dma_copy|sbuf"),
    "copies between HBM and PSUM": (
        "p = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.psum)\n"
        "nisa.dma_copy(dst=p, src=x_hbm)",
        r"sbuf|SBUF",
    ),
    "shape mismatch": (
        "nisa.tensor_tensor(dst=r, data1=x, data2=y[:, 0:32], op=nl.add)",
        r"32|shape",
    ),
    "op as a string": ("nisa.tensor_tensor(dst=r, data1=x, data2=y, op='add')", r"nl\.add"),
    "out of bounds": ("nisa.dma_copy(dst=r, src=x_hbm[0:128, 32:96])", r"64"),
    "returns a tile": ("nisa.tensor_copy(dst=r, src=x)\nreturn r", r"shared_hbm"),
    "par_dim": (
        "r = nl.ndarray((nl.par_dim(128), 64), dtype=nl.float32, buffer=nl.sbuf)",
        r"partition",
    ),
    "math.exp": ("r = math.exp(x)", r"nl\.exp"),
    "np.mean": ("r = np.mean(x)", r"nl\.mean"),
    "read before write": ("pass", r"write|memset|dma_copy"),
    "float64": ("r = nl.ndarray((128, 64), dtype=nl.float64, buffer=nl.sbuf)", r"nl\.float32"),
    "slice assignment": ("r[:, :] = x", r"tensor_copy"),
    "memset of a name": ("nl.memset(r, 0)", r"nisa\.memset"),
    "add": ("r = x + y", r"tensor_tensor"),
    "part of a copy": ("nisa.dma_copy(dst=r[0:64], src=x_hbm)", r"slice both sides"),
    "tensor_tensor without op": (
        "nisa.tensor_tensor(dst=r, data1=x, data2=y)",
        r"'op', expected.*; mend the call",
    ),
    "activation without op": ("nisa.activation(dst=r, data=x)", r"'op', expected.*; mend the call"),
    "tensor_scalar without a number": (
        "nisa.tensor_scalar(dst=r, data=x, op0=nl.multiply)",
        r"operand0",
    ),
    "nc_transpose returns": ("r = nisa.nc_transpose(x)", r"dst="),
    "mask": ("nisa.dma_copy(dst=r, src=x_hbm, mask=None)", r"slices of both"),
    "reduction into a whole tile": (
        "nisa.tensor_reduce(dst=r, data=x, op=nl.add, axis=1)",
        r"dst of 128 partitions with 1",
    ),
    "reduction over partitions": (
        "m = nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.sbuf)\n"
        "nisa.tensor_reduce(dst=m, data=x, op=nl.add, axis=0)",
        r"ones|transpose",
    ),
    "number of an element": ("print(float(x[0, 0]))", r"register_load"),
    "isa typo": ("nisa.tensor_copyy(dst=r, src=x)", r"nisa\.tensor_copy"),
    "reshape of partitions": ("r = x.reshape((64, 128))", r"nc_transpose"),
    "comparison": ("r = nl.where(x > 0, x, y)", r"nl\.greater"),
    "list of tiles": ("r = [x, y]", r"tensor"),
    "returns nothing": ("return", r"nl\.shared_hbm"),
}


# What a cell or script calls a right kernel(x_hbm, y_hbm) with; `o` is an array (128, 64) of fp32.
CALLS = {
    "no arguments": ("kernel()", r"kernel\(x_hbm, y_hbm\)|without arguments"),
    "one too few": ("kernel(o)", r"kernel\(x_hbm, y_hbm\)"),
    "one too many": ("kernel(o, o, o)", r"kernel\(x_hbm, y_hbm\)"),
    "unknown keyword": ("kernel(o, y=o)", r"kernel\(x_hbm, y_hbm\)"),
    "float64": ("kernel(o, o.astype(np.float64))", r"argument y_hbm: .*32 bits or fewer"),
    "int64": ("kernel(torch.zeros(128, 64).long(), o)", r"argument x_hbm: .*32 bits or fewer"),
    "complex": ("kernel(o, y_hbm=o.astype(np.complex64))", r"argument y_hbm: .*32 bits or fewer"),
}
