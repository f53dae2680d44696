(function ($) {
    var refresh = function () {
        if (!AUTOREFRESH_FLAG) { return setTimeout(refresh, POLL_INTERVAL); }
        $('#live').load(location.pathname + ' #live > *', function (text, status) {
            $('#old').toggle(status === 'error');
            setTimeout(refresh, POLL_INTERVAL);
        });
    };
    setTimeout(refresh, POLL_INTERVAL);
})(jQuery);
